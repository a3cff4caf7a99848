"""Text, its tokens, and batches of them."""
