"""The ops of a CPU step in C++, compiled on first use where there is a compiler."""
