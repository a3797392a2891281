package superblock

import "unsafe"

// alignedPage is a page of memory that O_DIRECT takes.
func alignedPage() []byte { return aligned(pageSize) }

// aligned is memory of n bytes that begins at a multiple of 4 KiB.
func aligned(n int) []byte {
	raw := make([]byte, n+pageSize)
	skip := (pageSize - int(uintptr(unsafe.Pointer(&raw[0]))%pageSize)) % pageSize //nolint:gosec // only the address is used
	return raw[skip : skip+n : skip+n]
}
