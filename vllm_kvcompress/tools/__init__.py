"""Evaluation, benchmarks, profiles and models for the commands of this package."""
