// Linked in place of macOS's Objective-C runtime, which has these symbols.
#define SYMBOL(name) \
  extern "C" [[gnu::visibility("default")]] void name() {}
SYMBOL(objc_getProtocol)
SYMBOL(objc_lookUpClass)
SYMBOL(objc_msgSend)
SYMBOL(sel_registerName)
