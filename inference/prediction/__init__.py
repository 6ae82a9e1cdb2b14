"""What decoding will give, from one teacher-forced pass over texts of the target."""
