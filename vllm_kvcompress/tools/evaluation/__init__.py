"""What a policy costs in quality: questions asked through the serving engine, at many settings."""
