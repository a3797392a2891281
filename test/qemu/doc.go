// Package qemu runs on another kernel what this machine's does not allow: it
// lets a mounted ext4 grow with the capability that a container lacks.
package qemu
