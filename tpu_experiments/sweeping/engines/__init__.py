"""Engines that run the points of a sweep: this machine, a Ray cluster, or SkyPilot's managed jobs."""
