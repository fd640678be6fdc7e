"""The model room: decoder families in Flax NNX, tokenizers, Hugging Face folders in and out."""
