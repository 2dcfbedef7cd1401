"""The one place that sees both wings: the store's bytes and the algorithms' tensors."""
