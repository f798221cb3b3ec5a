"""Commands and checks around a run. Nothing below this folder imports it."""
