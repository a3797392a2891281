package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
)

// groups keeps a record for each group of snapshots, beside the records of its members. The
// group's record is written before those of the members and removed after them. It alone says
// whether the group exists: if it is ready, its members become ready, else they are removed.
type groups struct {
	pool   *pool
	cloner *cloner
	store  store
}

func openGroups(disks *pool, clones *cloner) (*groups, error) {
	g := &groups{pool: disks, cloner: clones, store: store{dir: filepath.Join(disks.config.DataDir, "groups"), spare: disks.store.spare}}
	return g, os.MkdirAll(g.store.dir, 0o700)
}

// members returns the ids of the snapshots of a group.
func (r *record) members() (ids []string) {
	for _, volume := range r.Volumes {
		ids = append(ids, r.ID+"-"+fileName(volume)[:32])
	}
	return ids
}

// existing returns a group that an earlier call has made, or nil. A group that was made or
// removed only in part is removed.
func (g *groups) existing(id string) (*record, error) {
	r, err := g.store.load(id)
	if err != nil || r == nil || r.Ready {
		return r, err
	}
	return nil, g.erase(r)
}

// create makes the snapshots of a group. If it fails, nothing is left.
func (g *groups) create(ctx context.Context, r *record) error {
	began := time.Now()
	var jobs []*job
	for i, member := range r.members() {
		of := source{Volume: r.Volumes[i]}
		from, err := g.cloner.find(of)
		if err != nil {
			return err
		}
		r.Capacity += from.Capacity
		jobs = append(jobs, &job{from: from, to: &record{
			Version: recordVersion, ID: member, Capacity: from.Capacity, Source: of, Snapshot: &snapshot{Group: r.ID},
		}})
	}
	if err := g.store.save(r); err != nil {
		return err
	}
	failpoint.Hit("driver-group-recorded")
	if err := g.fill(ctx, r, jobs); err != nil {
		return afterUndo(err, g.erase(r))
	}
	failpoint.Hit("driver-group-made")
	whole := &snapshot{Consistent: !slices.ContainsFunc(jobs, func(j *job) bool { return !j.to.Snapshot.Consistent })}
	g.pool.log.Info("made a group snapshot", zap.String("group", r.ID), zap.Strings("volumes", r.Volumes),
		zap.Stringer("consistent", whole), zap.Duration("took", time.Since(began)))
	return nil
}

// fill makes the members of a group, and then the group's record ready. The members' records
// are not ready yet.
func (g *groups) fill(ctx context.Context, r *record, jobs []*job) error {
	for _, j := range jobs {
		needed, err := g.cloner.needs(j.from, j.to)
		if err == nil {
			err = g.pool.reserve(j.to, j.to.Capacity, needed)
		}
		if err != nil {
			return err
		}
		failpoint.Hit("driver-recorded")
	}
	if err := g.cloner.fill(ctx, jobs...); err != nil {
		return err
	}
	for _, j := range jobs {
		if err := errors.Join(g.pool.makeImage(j.to), g.pool.store.save(j.to)); err != nil {
			return err
		}
	}
	failpoint.Hit("driver-image-made")
	r.Ready, r.Created = true, jobs[0].to.Created
	return g.store.save(r)
}

// complete returns the members of a group that exists, and makes their records ready, which
// the call that made the group may not have done before the driver was killed.
func (g *groups) complete(r *record) (members []*record, err error) {
	for _, id := range r.members() {
		m, err := g.pool.store.load(id)
		if err == nil && m == nil {
			err = status.Errorf(codes.DataLoss, "group snapshot %q: the record of its snapshot %q is gone", r.ID, id)
		}
		if err == nil && !m.Ready {
			m.Ready = true
			if err = g.pool.store.save(m); err != nil { // the group is there: a later call completes it
				err = status.Error(codes.Aborted, err.Error())
			}
		}
		if err != nil {
			return nil, err
		}
		members = append(members, m)
	}
	return members, nil
}

// erase removes a group and those of its members that exist.
func (g *groups) erase(r *record) error {
	if err := g.store.unready(r); err != nil {
		return err
	}
	failpoint.Hit("driver-group-erasing")
	for _, id := range r.members() {
		m, err := g.pool.store.load(id)
		if err == nil && m != nil {
			err = g.pool.erase(m)
		}
		if err != nil {
			return err
		}
	}
	failpoint.Hit("driver-group-emptied")
	return g.store.remove(r.ID)
}

// sweep completes or removes groups that were unfinished when the driver was killed.
func (g *groups) sweep() error {
	if err := g.store.clean(); err != nil {
		return err
	}
	all, err := g.store.list()
	if err != nil {
		g.pool.log.Error("some records of groups cannot be read; their snapshots are left alone", zap.Error(err))
	}
	for _, r := range all {
		if !r.Ready {
			err = g.erase(r)
		} else {
			_, err = g.complete(r)
		}
		if err != nil {
			g.pool.log.Error("a group snapshot is unfinished and left alone", zap.String("group", r.ID), zap.Error(err))
		}
	}
	return nil
}
