"""The reference model: a small decoder that answers retrieval questions, and how it was made."""
