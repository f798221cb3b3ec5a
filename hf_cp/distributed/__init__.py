"""Processes and what they send each other: the only place that calls torch.distributed."""
