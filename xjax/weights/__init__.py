"""From a checkpoint's tensors to a family's parameters on the device.

What a file's bytes mean is known to xjax.checkpoints, what a parameter does to xjax.models.
"""
