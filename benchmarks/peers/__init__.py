"""What autotp is measured beside: layers by hand, and the plans of other libraries."""
