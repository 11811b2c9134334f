"""The science: pure routing, admission and pacing. No I/O, no clock, no asyncio; events in, decisions out."""
