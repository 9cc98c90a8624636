"""Parameters in xjax's own form on disk: arrays by name, as orbax writes and reads them.

What a manifest holds is known to xjax.checkpoints.saved, what a parameter does to xjax.models.
"""
