"""flex_attention of torch: an operator with a rule, whose score and mask functions are texts."""
