"""The name under which adapters of users import `BadInput`."""
