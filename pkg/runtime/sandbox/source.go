package sandbox

import (
	"path/filepath"
	"strings"
)

// isSource tells whether a mount's host path is source, which is resolved.
// Kubelet's directory may be a symbolic link, and runtimes give the path as
// kubelet named it: containerd resolves only its last part. What could not be
// kubelet's name for source is not looked at: it may be on a server that hangs.
func isSource(pod, hostPath, source string) bool {
	if hostPath == source {
		return true
	}
	ofPod := strings.LastIndex(hostPath, "/pods/"+pod+"/")
	if ofPod < 0 || !strings.HasSuffix(source, hostPath[ofPod:]) {
		return false
	}
	resolved, err := filepath.EvalSymlinks(hostPath)
	return err == nil && resolved == source
}
