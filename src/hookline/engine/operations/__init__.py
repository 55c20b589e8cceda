"""Operations: the calls of torch's functions in a module's own forward, hooked like modules."""
