"""The processes of a run: hosts, start, environment, requests to stop, ends."""
