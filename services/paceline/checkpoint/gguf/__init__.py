"""GGUF files as checkpoints: a directory that describes one, and its weights as transformers names them.

``header.py`` reads a file, ``config.py`` and ``tokenizer.py`` make the files of a checkpoint directory from it,
``described.py`` keeps that directory, ``weights.py`` dequantizes tensors while they are read.
"""
