//go:build system

package kube_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestUserNamespaces has pods whose root is nobody on the node (hostUsers: false) write to
// deferred volumes: on the devices the owners are the pods' own.
func TestUserNamespaces(t *testing.T) { inEachWay(cluster.Beside(t), t, "users", ownUsers) }

// ownUsers takes a volume through a pod with users of its own, one on the node without, and another one with.
func ownUsers(k *cluster.Kube, way, driver string) {
	v := k.NewVolume(cluster.VolumeOptions{Name: "users-" + way, Driver: driver})
	first := withUsers(k.NewPod(v.Name+"-1", cluster.Crust).With(v, "/data").With(v, "/sub", subPath("dir"))).Start()
	wantDeferred(k, first, v, inCrust)
	wantGuarded(k, first, v)
	wantNobody(k, first)
	first.Exec("touch /data/root /sub/root && touch /data/given && chown 1234:1234 /data/given")
	wantOut(k, first, "member", "touch /data/member && id -u", fmt.Sprintln(someone))
	const owners = "root 0:2000\ndir/root 0:2000\ngiven 1234:1234\nmember 1000:2000\n"
	const ask = "cd /data && stat -c '%n %u:%g' root dir/root given member"
	wantOut(k, first, "main", ask, owners)
	first.WaitStats(v, "/data")
	first.Delete()

	onNode := k.NewPod(v.Name+"-2", cluster.Runc).With(v, "/data").Start()
	wantOnHost(k, onNode, v)
	wantOut(k, onNode, "main", ask, owners)
	onNode.Delete()

	second := withUsers(k.NewPod(v.Name+"-3", cluster.Crust).With(v, "/data")).Start()
	wantNobody(k, second)
	wantOut(k, second, "main", "echo more >> /data/given && cat /data/given", "more\n")
	second.Delete()
}

// withUsers gives a pod a user namespace, which the node's network forbids, a group for its
// volumes, and a container member that is not root.
func withUsers(p *cluster.Pod) *cluster.Pod {
	group, user, users := fsGroup, someone, false
	p.Spec.HostUsers, p.Spec.HostNetwork = &users, false
	p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &group}
	member := cluster.Sleeper("member")
	member.SecurityContext = &corev1.SecurityContext{RunAsUser: &user}
	member.VolumeMounts = []corev1.VolumeMount{p.Spec.Containers[0].VolumeMounts[0]}
	p.Spec.Containers = append(p.Spec.Containers, member)
	return p
}

// wantNobody wants that the pod's root is none of the node's users.
func wantNobody(k *cluster.Kube, p *cluster.Pod) {
	k.T.Helper()
	pid, err := p.Pid("main")
	k.Must(err)
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	k.Must(err)
	_, after, _ := strings.Cut(string(raw), "\nUid:\t")
	var uid int
	if _, err := fmt.Sscan(after, &uid); err != nil || uid < 65536 {
		k.T.Errorf("on the node the pod's root is user %d, %v", uid, err)
	}
	wantOut(k, p, "main", "id -u", "0\n")
}
