"""What a model does under the compiler and under measurement, found out before it drives."""
