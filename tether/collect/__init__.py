"""The desk: where people compare answers. Free of torch until a model is asked."""
