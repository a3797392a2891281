package doctor

import "cmp"

// Service gives the commands by which an operator reaches the daemon: systemd's, or
// kubectl's where it runs in a pod.
type Service struct {
	InPod bool
	// Namespace and Pod are empty where they are not known.
	Namespace, Pod string
}

// ServiceOf reads what the DaemonSet puts into the container's environment. Kubernetes'
// own variables tell nothing: a debug pod that enters a node's root has them too.
func ServiceOf(getenv func(string) string) Service {
	pod := getenv("POD_NAME")
	return Service{InPod: pod != "", Namespace: getenv("POD_NAMESPACE"), Pod: pod}
}

// Status shows how the daemon is.
func (s Service) Status() string {
	return s.either("systemctl status crust-proxy", "describe pod ")
}

// Logs shows its log.
func (s Service) Logs() string {
	return s.either("journalctl -u crust-proxy", "logs ")
}

// Restart restarts it on this node, and on no other.
func (s Service) Restart() string {
	return s.either("systemctl restart crust-proxy", "delete pod ")
}

func (s Service) either(systemd, kubectl string) string {
	if !s.InPod {
		return systemd
	}
	return "kubectl -n " + cmp.Or(s.Namespace, "NAMESPACE") + " " + kubectl + cmp.Or(s.Pod, "POD")
}
