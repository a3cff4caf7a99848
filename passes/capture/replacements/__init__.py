"""What stands for parts of torch while a model is captured, since an exporter cannot take them."""
