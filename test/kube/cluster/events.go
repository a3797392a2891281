//go:build system

package cluster

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Events are what `kubectl describe pod` shows: reason and message.
func (p *Pod) Events() []string {
	ctx, cancel := p.k.context()
	defer cancel()
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

// WaitEvent waits for an event with a reason, such as FailedMount, whose message
// has some words, and gives the message.
func (p *Pod) WaitEvent(reason string, words ...string) string {
	p.k.T.Helper()
	var found string
	p.k.Eventually(fmt.Sprintf("pod %s has an event %s with %q", p.Name, reason, words), func(context.Context) error {
		all := p.Events()
		for _, one := range all {
			if message, is := strings.CutPrefix(one, reason+": "); is && hasAll(message, words) {
				found = message
				return nil
			}
		}
		return fmt.Errorf("it has %s", strings.Join(all, "; "))
	})
	return found
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
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
	ctx, cancel := p.k.context()
	defer cancel()
	raw, err := p.k.Client.CoreV1().Pods(Namespace).GetLogs(p.Name, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	return string(raw), err
}
