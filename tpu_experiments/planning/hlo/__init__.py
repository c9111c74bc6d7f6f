"""A compiled TPU program as numbers: text of HLO in; cycles, FLOPs, bytes, loops and collectives out."""
