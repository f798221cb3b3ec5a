"""Processes and wires: the only place that calls torch.distributed."""
