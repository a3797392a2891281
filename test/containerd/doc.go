// Package containerd tests the sandbox tracker against the real containerd and runc.
package containerd
