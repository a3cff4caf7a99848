"""What a person sees: results as text, in colour, and as HTML in a notebook; and the progress of a long call."""
