"""What no seam of torchtitan 0.3.0 allows, one file a shim, each with the reason and the version that ends it."""
