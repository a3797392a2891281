package doctor

import "cmp"

// Service has the commands with which an operator manages the daemon: systemd's, or kubectl's if
// it runs in a pod.
type Service struct {
	InPod bool
	// Namespace and Pod are empty where they are not known.
	Namespace, Pod string
}

// ServiceOf reads the variables that the DaemonSet sets in the container. Kubernetes' own
// variables prove nothing: a debug pod that enters a node's root has them too.
func ServiceOf(getenv func(string) string) Service {
	pod := getenv("POD_NAME")
	return Service{InPod: pod != "", Namespace: getenv("POD_NAMESPACE"), Pod: pod}
}

// Status shows the daemon's state.
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
