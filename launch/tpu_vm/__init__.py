"""Launcher behind launch/tpu.py: pure functions decide, gcloud and ssh run at the edge.

Nothing here imports torch.
"""
