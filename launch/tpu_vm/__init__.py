"""The launcher behind launch/tpu.py: decisions in pure functions, gcloud and ssh at the edge; never imports torch."""
