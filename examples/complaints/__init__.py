"""Famous complaints about tensor and pipeline parallelism, each as a short script; docs/complaints.md shows them."""
