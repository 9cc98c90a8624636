"""What the commands of `xjax bench` do once their flags are read; loaded when one of them runs."""
