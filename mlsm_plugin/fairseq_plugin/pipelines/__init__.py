"""Training runs that the mlsm command starts, and chains of steps that contain them."""
