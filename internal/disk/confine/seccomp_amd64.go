package confine

import "golang.org/x/sys/unix"

// deniedHere are older forms of denied calls that only this architecture has.
var deniedHere = []uint32{unix.SYS_CHMOD, unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_INOTIFY_INIT}
