"""The closed loop: scenarios, vehicles and sensors around the stages."""
