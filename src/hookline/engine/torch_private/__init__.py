"""Every private name of torch, each behind a function whose test says what breaks without it."""
