/* Stream-ordered pools and managed memory. A pool's len is its release threshold, its count what is allocated of it and
 * one for itself, its flags whether it may make an allocation wait for another stream. Memory's other is its pool. */
struct pool_properties { uint32_t kind, handle_types, location_kind; int device; void *win32; unsigned char rest[64]; };

result cuMemPoolCreate(void **pool, const struct pool_properties *properties) {
    ENTER(0);
    if (properties->kind != 1 || properties->handle_types || properties->location_kind != 1) return 1;
    for (unsigned i = 0; i < sizeof properties->rest; i++)
        if (properties->rest[i]) return 1;
    struct object *o = add(MEMPOOL, next_number, 0);
    next_number += 16;
    o->device = properties->device;
    o->flags = 1;
    *pool = (void *)(uintptr_t)o->key;
    return 0;
}
static void drop_pool(address key) {
    struct object *o = find(MEMPOOL, key);
    if (!o) violations++;
    else if (--o->count == 0) o->kind = NONE;
}
result cuMemPoolDestroy(void *pool) {
    ENTER(0);
    if (!find(MEMPOOL, (address)pool)) {
        violations++;
        return 1;
    }
    drop_pool((address)pool);
    return 0;
}
result cuMemPoolSetAttribute(void *pool, uint32_t attribute, void *value) {
    ENTER(0);
    struct object *o = find(MEMPOOL, (address)pool);
    if (!o) return 1;
    switch (attribute) {
    case 3: o->flags = *(int *)value; return 0;
    case 4: o->len = *(uint64_t *)value; return 0;
    default: return 1;
    }
}
result cuMemPoolGetAttribute(void *pool, uint32_t attribute, void *value) {
    ENTER(0);
    if (!find(MEMPOOL, (address)pool) || (attribute < 5 || attribute > 7)) return 1;
    uint64_t used = 0;
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++)
        if (objects[i].kind == POOL && objects[i].other == (address)pool) used += objects[i].len;
    *(uint64_t *)value = attribute == 7 ? used : (used + 0x1fffff) / 0x200000 * 0x200000;
    return 0;
}
result cuMemPoolTrimTo(void *pool, size_t keep) {
    ENTER(0);
    (void)keep;
    return find(MEMPOOL, (address)pool) ? 0 : 1;
}
result cuMemAllocFromPoolAsync(address *base, size_t len, void *pool, void *stream) {
    ENTER(NEEDS_CONTEXT);
    struct object *o = find(MEMPOOL, (address)pool);
    if (!o || !len) return 1;
    if ((address)stream > 2 && !find(STREAM, (address)stream)) violations++;
    *base = take_addresses(len);
    add(POOL, *base, len)->other = o->key;
    o->count++;
    return 0;
}
result cuMemFreeAsync(address base, void *stream) {
    ENTER(NEEDS_CONTEXT);
    struct object *o = find(POOL, base);
    if ((address)stream > 2 && !find(STREAM, (address)stream)) violations++;
    if (o && o->other) drop_pool(o->other);
    return give_back(POOL, base);
}
result cuMemAllocManaged(address *base, size_t len, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    if (flags != 1 || !len) return 1;
    *base = take_addresses(len);
    add(MANAGED, *base, len);
    return 0;
}
