/* Which sources this library was made from; `build.py` defines it. */

unsigned made_from(void) { return FINGERPRINT; }
