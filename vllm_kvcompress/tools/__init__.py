"""What measures and trains; nothing of it runs while requests are served."""
