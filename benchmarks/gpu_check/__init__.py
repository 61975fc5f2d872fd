"""`make gpu-check`: what this project is worth on the GPU at hand, on one page."""
