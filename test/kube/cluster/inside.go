package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// Exec runs a shell script in the container main and gives what it wrote. It does
// not go by kubelet or the API server, so that they may be away, unless the node is elsewhere.
func (p *Pod) Exec(script string) string {
	p.k.T.Helper()
	out, err := p.TryExec("main", script)
	check.Require(p.k.T, err == nil, "pod %s: %s: %v", p.Name, script, err)
	return out
}

// TryExec runs a shell script in one of the containers. A script that fails is a
// *cri.ExitError.
func (p *Pod) TryExec(container, script string) (string, error) {
	if p.k.elsewhere() {
		return p.k.Kubectl("exec", p.Name, "--container="+container, "--", "/bin/sh", "-c", script)
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	id, err := p.containerID(ctx, container)
	if err != nil {
		return "", err
	}
	return p.k.Containerd.Exec(ctx, id, script)
}

// containerID is that of the running container.
func (p *Pod) containerID(ctx context.Context, name string) (string, error) {
	reply, err := p.k.Containerd.CRI.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		State:         &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": string(p.UID), "io.kubernetes.container.name": name},
	}})
	if err != nil {
		return "", err
	}
	if len(reply.GetContainers()) != 1 {
		return "", fmt.Errorf("pod %s has %d running containers %s", p.Name, len(reply.GetContainers()), name)
	}
	return reply.GetContainers()[0].GetId(), nil
}

// Sandbox is the id of the pod's sandbox that is ready.
func (p *Pod) Sandbox() (string, error) {
	ctx := context.Background()
	reply, err := p.k.Containerd.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{
		State:         &runtimeapi.PodSandboxStateValue{State: runtimeapi.PodSandboxState_SANDBOX_READY},
		LabelSelector: map[string]string{"io.kubernetes.pod.uid": string(p.UID)},
	}})
	if err != nil {
		return "", err
	}
	if len(reply.GetItems()) != 1 {
		return "", fmt.Errorf("pod %s has %d sandboxes that are ready", p.Name, len(reply.GetItems()))
	}
	return reply.GetItems()[0].GetId(), nil
}

// Pid is the first process of a running container, as the node sees it.
func (p *Pod) Pid(container string) (int, error) {
	ctx := context.Background()
	id, err := p.containerID(ctx, container)
	if err != nil {
		return 0, err
	}
	return p.k.Containerd.Pid(ctx, id)
}

// Target is where kubelet has a volume published.
func (p *Pod) Target(v *Volume) string {
	return filepath.Join(KubeletRoot, "pods", string(p.UID), "volumes/kubernetes.io~csi", v.PV, "mount")
}

// Usage is what a filesystem has, in bytes and inodes.
type Usage struct {
	Total, Used, Available                   int64
	TotalInodes, UsedInodes, AvailableInodes int64
}

// DF is the usage that the pod's own df tells for a mount.
func (p *Pod) DF(path string) Usage {
	p.k.T.Helper()
	size, inodes := p.df("-k", path), p.df("-i", path)
	return Usage{
		Total: size[0] << 10, Used: size[1] << 10, Available: size[2] << 10,
		TotalInodes: inodes[0], UsedInodes: inodes[1], AvailableInodes: inodes[2],
	}
}

// df reads the three numbers of one line.
func (p *Pod) df(flag, path string) [3]int64 {
	p.k.T.Helper()
	out := p.Exec("df -P " + flag + " " + path + " | tail -n 1")
	fields := strings.Fields(out)
	check.Require(p.k.T, len(fields) >= 4, "df tells %q", out)
	var numbers [3]int64
	for i := range numbers {
		number, err := strconv.ParseInt(fields[i+1], 10, 64)
		check.Require(p.k.T, err == nil, "df tells %q: %v", out, err)
		numbers[i] = number
	}
	return numbers
}

// Events are what `kubectl describe pod` shows: reason and message.
func (p *Pod) Events() []string {
	ctx := context.Background()
	list, err := p.k.Client.CoreV1().Events(Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(p.UID)})
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	for _, one := range list.Items {
		out = append(out, one.Reason+": "+one.Message)
	}
	return out
}

// WaitEvent waits for an event with a reason, such as FailedMount, whose message has some words, and gives the message.
func (p *Pod) WaitEvent(reason string, words ...string) string {
	p.k.T.Helper()
	var found string
	p.k.Eventually(fmt.Sprintf("pod %s has an event %s with %q", p.Name, reason, words), func(context.Context) error {
		all := p.Events()
		for _, one := range all {
			message, is := strings.CutPrefix(one, reason+": ")
			if is && !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(message, word) }) {
				found = message
				return nil
			}
		}
		return fmt.Errorf("it has %s", strings.Join(all, "; "))
	})
	return found
}

// Describe is what `kubectl describe pod` shows.
func (p *Pod) Describe() string {
	out, err := p.k.Kubectl("describe", "pod", p.Name)
	if err != nil {
		return strings.Join(append(p.Events(), err.Error()), "\n")
	}
	return out
}

// Log is what a container has written, through the API server and kubelet.
func (p *Pod) Log(container string) (string, error) {
	ctx := context.Background()
	raw, err := p.k.Client.CoreV1().Pods(Namespace).GetLogs(p.Name, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	return string(raw), err
}

// summary is what of kubelet's /stats/summary is read here.
type summary struct {
	Pods []struct {
		PodRef struct {
			UID string `json:"uid"`
		} `json:"podRef"`
		Volume []struct {
			Name           string `json:"name"`
			CapacityBytes  int64  `json:"capacityBytes"`
			UsedBytes      int64  `json:"usedBytes"`
			AvailableBytes int64  `json:"availableBytes"`
			Inodes         int64  `json:"inodes"`
			InodesUsed     int64  `json:"inodesUsed"`
			InodesFree     int64  `json:"inodesFree"`
		} `json:"volume"`
	} `json:"pods"`
}

// Stats is what kubelet's /stats/summary says of one of the pod's volumes, by the
// name that it has in the pod. Kubelet asks every ten seconds.
func (p *Pod) Stats(ctx context.Context, volume string) (Usage, error) {
	raw, err := p.k.Client.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/" + NodeName + "/proxy/stats/summary").DoRaw(ctx)
	if err != nil {
		return Usage{}, err
	}
	var all summary
	if err := json.Unmarshal(raw, &all); err != nil {
		return Usage{}, err
	}
	for _, pod := range all.Pods {
		for _, one := range pod.Volume {
			if pod.PodRef.UID == string(p.UID) && one.Name == volume {
				return Usage{
					Total: one.CapacityBytes, Used: one.UsedBytes, Available: one.AvailableBytes,
					TotalInodes: one.Inodes, UsedInodes: one.InodesUsed, AvailableInodes: one.InodesFree,
				}, nil
			}
		}
	}
	return Usage{}, fmt.Errorf("kubelet has no stats of volume %s of pod %s", volume, p.Name)
}

// WaitStats waits until kubelet tells what df tells inside, and gives it.
func (p *Pod) WaitStats(v *Volume, path string) Usage {
	p.k.T.Helper()
	var inside Usage
	p.k.Eventually("stats of volume "+v.Name+" are what df tells", func(ctx context.Context) error {
		stats, err := p.Stats(ctx, v.Name)
		if err != nil {
			return err
		}
		if inside = p.DF(path); stats != inside {
			time.Sleep(time.Second) // kubelet asks every ten seconds, and each look is two processes
			return fmt.Errorf("kubelet tells %+v, df tells %+v", stats, inside)
		}
		return nil
	})
	return inside
}
