"""A model on its way through the compiler, pass by pass: its graph at each stage, and what each pass did to it."""
