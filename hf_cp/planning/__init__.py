"""What a run will need, computed before it runs: memory, bytes on the wire and time, from integers and a few rates."""
