"""What a model does under the compiler and under measurement, before it drives."""
