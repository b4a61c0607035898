"""What a device is and can do, and the private parts of torch that are used."""
