"""The policy: torchtitan's model definitions with tap points, Hugging Face weights in and out."""
