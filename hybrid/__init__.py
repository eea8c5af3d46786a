"""hybrid: RL for language models on GPUs that every role shares.

Shape legend, used as a suffix of tensor names throughout the package:
B sequences (rows), T response tokens of a row, N tokens of a packed micro-batch, H hidden size, V vocabulary.
"""

__version__ = "0.1.0"
