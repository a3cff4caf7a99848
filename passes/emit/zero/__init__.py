"""ZeRO in a rank's graph: parameters of which replicas keep rows are gathered for their block, and gradients summed."""
